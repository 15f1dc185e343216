"""How padding spreads through each operator, and what keeps it out of results: one file a kind of operator."""
