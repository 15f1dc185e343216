"""Tokens in the order that their attentions' masks want: moved once before these attentions and once behind them."""
