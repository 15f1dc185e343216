"""Device code of matrix products after the multiplication: steps, norms, statistics, stores."""
