"""Looking through Relax: what a variable is bound to, what it is known to hold, and writing functions anew."""
