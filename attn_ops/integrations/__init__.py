"""Other libraries' interfaces over this one. Each module imports its library, and nothing else imports them."""
