"""What the clients share: batches of ids, results, retries, addresses, credentials."""
