"""What holds for every route."""
