/* Boxes that scroll sideways can be reached by the keyboard. */
"use strict";
{
  const boxes = document.querySelectorAll("pre, .table-wrapper");
  const mark = () => boxes.forEach(box => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });
  mark();
  addEventListener("resize", mark);
  document.addEventListener("change", mark);  // another tab of a set, whose boxes were not shown
  document.addEventListener("toggle", mark, true);  // an opened <details>
}
