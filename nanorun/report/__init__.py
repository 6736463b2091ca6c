"""What is shown of runs afterwards: plots, and the HTML page that holds them."""
