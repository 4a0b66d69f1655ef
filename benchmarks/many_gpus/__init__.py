"""What several GPUs of one host do for models and collectives: parts that are independent and can be resumed."""
