"""What makes models exportable: their caches, experts, windows and guards in forms that do not depend on values."""
