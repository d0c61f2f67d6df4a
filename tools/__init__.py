"""The build of the book: execute chapters once, turn those outputs into pages, check the pages."""
