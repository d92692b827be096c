// What Sphinx and the theme leave out for keyboards and screen readers.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
  // A signature with one parameter per line is a list of parameters, marked up as definitions without terms.
  for (const parameters of document.querySelectorAll("dt.sig dl")) {
    parameters.setAttribute("role", "list");
    for (const parameter of parameters.children) parameter.setAttribute("role", "listitem");
  }
  // The arrow keys scroll a box only if it can have the focus.
  const focusable = () => {
    const boxes = "pre, .table-wrapper, div.cell_output .output, div.cell_output [style*=overflow-x]";
    for (const box of document.querySelectorAll(boxes)) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  focusable();
  addEventListener("resize", focusable);
  addEventListener("toggle", focusable, true); // A box in a closed part of a page has no width.
});
