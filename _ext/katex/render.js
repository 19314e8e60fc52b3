// Typesets every formula that _ext/course.py marked; runs once the page is parsed.
for (const element of document.querySelectorAll(".math.tex")) {
  const displayMode = element.tagName === "DIV";
  katex.render(element.textContent, element, { displayMode, throwOnError: false });
  if (!displayMode) keepTogether(element);
}

// A browser may break a line between a formula and the comma after it; this forbids it.
function keepTogether(formula) {
  const [before, after] = [formula.previousSibling, formula.nextSibling];
  const open = /[(\[“‘]+$/.exec(before?.data ?? "")?.[0] ?? "";
  const close = /^[.,;:!?)\]”’]+/.exec(after?.data ?? "")?.[0] ?? "";
  if (!open && !close) return;
  const line = document.createElement("span");
  line.style.whiteSpace = "nowrap";
  formula.replaceWith(line);
  line.append(open, formula, close);
  if (open) before.data = before.data.slice(0, -open.length);
  if (close) after.data = after.data.slice(close.length);
}
