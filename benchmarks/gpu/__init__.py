"""Everything that needs a GPU, in parts that end within minutes: ``bash scripts/gpu_campaign.sh``."""
