"""`tread finetune`: released models, tuned with routing."""
