// Opening, closing and following links work without this script. It adds keys, a filter and two buttons.
"use strict";
const layers = [...document.querySelectorAll("#layers details.layer")];
const filter = document.getElementById("filter");
const count = document.getElementById("count");
const shown = () => layers.filter((layer) => !layer.parentElement.hidden);

function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  target.scrollIntoView();
  (target.tagName === "DETAILS" ? target.querySelector("summary") : target).focus();
}

function select() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const layer of layers) {
    const text = layer.textContent.toLowerCase();
    layer.parentElement.hidden = !words.every((word) => text.includes(word));
  }
  count.textContent = words.length ? `${shown().length} of ${layers.length} layers` : "";
}

function move(event) {
  const rows = shown().map((layer) => layer.querySelector("summary"));
  const at = rows.indexOf(document.activeElement);
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "/" && document.activeElement !== filter) {
    event.preventDefault();
    filter.focus();
  } else if (event.key === "Escape" && document.activeElement === filter) {
    filter.value = "";
    select();
  } else if (at >= 0) {
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "ArrowRight") rows[at].parentElement.open = true;
    else if (event.key === "ArrowLeft") rows[at].parentElement.open = false;
    else if (next === undefined) return;
    else if (rows[next]) rows[next].focus();
    event.preventDefault();
  }
}

if (filter) {
  document.getElementById("tools").hidden = false;
  filter.addEventListener("input", select);
  document.addEventListener("keydown", move);
  for (const button of document.querySelectorAll("button[data-open]"))
    button.addEventListener("click", () => shown().forEach((layer) => { layer.open = button.dataset.open === "yes"; }));
}
window.addEventListener("hashchange", reveal);
reveal();
