"""What flows between the stages: frozen data about values, ops, profiles and plans. No torch, no decisions."""
