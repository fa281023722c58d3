// Elements of a page. Text is only ever in text nodes.

/** Creates an element with attributes; children are elements or text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value; else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (typeof child === "string" ? visible(child) : child)));
  return made;
}

function dot(colour) {
  const made = element("i", { class: "dot", "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}
