"""How the arrays of clients become one array on every rank: ways, messages, what is shared out, what rounding took."""
