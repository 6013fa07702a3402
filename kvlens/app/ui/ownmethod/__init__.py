"""The page that checks a method in a file of one's own."""
