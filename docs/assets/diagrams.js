// Draws each diagram as an SVG in the colours of the page, and again when the reader changes them.
const diagrams = [...document.querySelectorAll("pre.diagram")].map((source) => {
  const picture = document.createElement("div");
  picture.className = "diagram";
  source.replaceWith(picture);
  return { text: source.textContent, picture };
});

async function draw() {
  const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
  // Mermaid measures text outside the page's column, so the font has to be named; notes are as wide as their text.
  const style = getComputedStyle(document.body);
  const [paper, ink] = dark ? ["#2a2e3a", "#e2e4e9"] : ["#f5f5f5", "#22252b"];
  mermaid.initialize({
    startOnLoad: false,
    theme: "base",
    fontFamily: style.fontFamily,
    sequence: { wrap: true, width: 190, actorMargin: 70 },
    themeVariables: {
      fontFamily: style.fontFamily, fontSize: "15px", darkMode: dark,
      primaryColor: paper, primaryTextColor: ink, primaryBorderColor: "#009485", lineColor: ink, textColor: ink,
      noteBkgColor: dark ? "#12433e" : "#d9f0ed", noteTextColor: ink, noteBorderColor: "#009485",
      actorLineColor: ink, signalColor: ink, signalTextColor: ink,
    },
  });
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
