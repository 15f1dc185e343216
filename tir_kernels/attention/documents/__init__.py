"""Documents that follow one another on a row: their lists, written on the GPU from where each begins."""
