"""The colours of all figures.

Okabe and Ito's ("Color universal design", 2008), which remain distinct with the common kinds of colour blindness.
"""

INK, GREY = "#1b1f24", "#8c959f"
SKY, BLUE, GREEN, ORANGE, VERMILLION, PURPLE = "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
BEFORE, AFTER = SKY, BLUE
