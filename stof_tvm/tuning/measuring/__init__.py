"""Building and timing of candidates, in processes of their own."""
