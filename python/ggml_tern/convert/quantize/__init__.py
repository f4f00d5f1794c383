"""Which type each tensor gets, and its values in that type."""
