// Typesets every formula that _ext/course.py marked; runs once the page is parsed.
for (const element of document.querySelectorAll(".math.tex")) {
  const displayMode = element.tagName === "DIV";
  katex.render(element.textContent, element, { displayMode, throwOnError: false });
}
