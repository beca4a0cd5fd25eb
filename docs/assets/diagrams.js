// Draws each diagram as an SVG in the colours of the page, and again when the reader changes them.
const diagrams = [...document.querySelectorAll("pre.diagram")].map((source) => {
  const picture = document.createElement("div");
  picture.className = "diagram";
  source.replaceWith(picture);
  return { text: source.textContent, picture };
});

async function draw() {
  const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
  mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral", fontFamily: "inherit" });
  for (const [number, { text, picture }] of diagrams.entries()) {
    const { svg } = await mermaid.render(`diagram-${number}`, text);
    picture.innerHTML = svg;
  }
}

if (diagrams.length) {
  const library = document.createElement("script");
  library.src = new URL("mermaid.js", document.currentScript.src);
  library.onload = () => {
    draw();
    new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  };
  document.head.append(library);
}
