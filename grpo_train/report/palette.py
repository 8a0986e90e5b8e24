"""The colours of all figures, and a line style with each, because nothing is told by colour alone.

The colours are Okabe and Ito's ("Color universal design", 2008), which remain distinct with the common kinds of colour
blindness.
"""

from cycler import cycler

# Text and axes.
INK, GREY = "#1b1f24", "#8c959f"
# A colour of every figure, distinct with the common kinds of colour blindness.
SKY, BLUE, GREEN, ORANGE, VERMILLION, PURPLE = "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
BEFORE, AFTER = SKY, BLUE
LINES = cycler(
    color=(BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY),
    linestyle=("-", "--", ":", "-.", (0, (8, 3)), (0, (6, 1.5, 1, 1.5, 1, 1.5))),
)
