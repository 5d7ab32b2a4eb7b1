"""The code that both clients share: batches of ids, results, retries, addresses, credentials."""
