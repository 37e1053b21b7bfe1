"""The routes of llama.cpp's server that editors call."""
