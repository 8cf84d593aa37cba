"""What turns a response into a reward: verifiers and the table that names them."""
