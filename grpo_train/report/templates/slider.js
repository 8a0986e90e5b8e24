"use strict";
(() => {
  const slider = document.getElementById("slider"), label = document.getElementById("label");
  const figures = [...document.querySelectorAll("figure")];
  function show() {
    figures.forEach((figure, number) => { figure.hidden = number !== Number(slider.value); });
    label.textContent = figures[slider.value].dataset.label;
    slider.setAttribute("aria-valuetext", label.textContent);
  }
  slider.addEventListener("input", show);
  show();
})();
