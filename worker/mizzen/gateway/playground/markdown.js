// Renders the Markdown of answers. It creates elements and text nodes only, and never parses HTML, so a model's text
// cannot become markup or script. Links lead to http, https and mailto alone; images are shown as links.

const MAX_DEPTH = 6; // of nested lists, quotes and emphasis
const MAX_SPAN = 4000; // characters in which the end of a span is searched, so that the time stays linear
// No pattern may backtrack over more than one run of characters: a line can be as long as an answer.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3}~*)(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?)?$/;
const SPECIAL = /[`*_~[\\]|!\[|https?:\/\//g;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)[^\s<>"]+$/i;
const ESCAPABLE = "\\`*_{}[]()#+-.!|~>";

function create(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function indentation(line) {
  return line.length - line.trimStart().length;
}

/** Return the blocks of lines of Markdown, each as its element and the number of its first line. */
function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const parse = findParser(lines, at, depth);
    const [node, next] = parse(lines, at, depth);
    blocks.push({ node, line: at });
    at = next;
  }
  return blocks;
}

function findParser(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return parseCode;
  if (HEADING.test(line)) return parseHeading;
  if (RULE.test(line)) return parseRule;
  if (depth < MAX_DEPTH && QUOTE.test(line)) return parseQuote;
  if (depth < MAX_DEPTH && ITEM.test(line)) return parseList;
  if (line.includes("|") && TABLE_RULE.test((lines[at + 1] ?? "").trim())) return parseTable;
  return parseParagraph;
}

function parseCode(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const language = info.trim().split(/\s/, 1)[0];
  const indent = indentation(lines[at]);
  const content = [];
  let next = at + 1;
  while (next < lines.length && !isClosingFence(lines[next], fence)) {
    content.push(lines[next].slice(Math.min(indent, indentation(lines[next]))));
    next += 1;
  }
  const text = content.join("\n");
  const caption = create("figcaption", {}, create("span", {}, language || "text"), copyButton(() => text));
  return [create("figure", {}, caption, create("pre", { tabIndex: 0 }, create("code", {}, text))), next + 1];
}

function isClosingFence(line, fence) {
  const mark = line.trim();
  return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
}

function parseHeading(lines, at, depth) {
  const [, marks, text] = HEADING.exec(lines[at]);
  return [create(`h${Math.min(marks.length + 1, 4)}`, {}, ...parseInline(text.trim().replace(/\s#+$/, ""), depth)), at + 1];
}

function parseRule(lines, at) {
  return [create("hr"), at + 1];
}

function parseQuote(lines, at, depth) {
  const content = [];
  let next = at;
  for (; next < lines.length; next += 1) {
    const match = QUOTE.exec(lines[next]);
    if (!match) break;
    content.push(match[1]);
  }
  const blocks = parseBlocks(content, depth + 1);
  return [create("blockquote", {}, ...blocks.map((block) => block.node)), next];
}

function parseList(lines, at, depth) {
  const [, space, marker] = ITEM.exec(lines[at]);
  const ordered = marker.length > 1;
  const list = ordered ? create("ol", { start: parseInt(marker, 10) }) : create("ul");
  let next = at;
  while (next < lines.length) {
    const match = ITEM.exec(lines[next]);
    const same = match && match[1].length <= space.length + 1 && match[2].length > 1 === ordered;
    if (!same || RULE.test(lines[next])) break;
    const content = [match[4]];
    next += 1;
    const inner = match[1].length + match[2].length + 1;
    while (next < lines.length && continuesItem(lines, next, match[1].length)) {
      content.push(lines[next].slice(Math.min(inner, indentation(lines[next]))));
      next += 1;
    }
    list.append(createItem(content, depth));
    while (next < lines.length && !lines[next].trim() && ITEM.test(lines[next + 1] ?? "")) next += 1;
  }
  return [list, next];
}

/** Return whether a line belongs to the list item that begins with `indent` spaces. */
function continuesItem(lines, at, indent) {
  if (!lines[at].trim()) return indentation(lines[at + 1] ?? "") > indent && lines[at + 1].trim() !== "";
  if (indentation(lines[at]) > indent + 1) return true;
  return !ITEM.test(lines[at]) && !FENCE.test(lines[at]) && !HEADING.test(lines[at]) && lines[at - 1].trim() !== "";
}

function createItem(content, depth) {
  const item = create("li");
  for (const { node } of parseBlocks(content, depth + 1)) {
    if (node.tagName === "P" && !item.hasChildNodes()) item.append(...node.childNodes);
    else item.append(node);
  }
  return item;
}

function parseTable(lines, at, depth) {
  const row = (line, tag) => create("tr", {}, ...cells(line).map((text) => create(tag, {}, ...parseInline(text, depth))));
  const body = create("tbody");
  const head = create("thead", {}, row(lines[at], "th"));
  let next = at + 2;
  for (; next < lines.length && lines[next].includes("|"); next += 1) body.append(row(lines[next], "td"));
  return [create("div", { className: "scroll", tabIndex: 0 }, create("table", {}, head, body)), next];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function parseParagraph(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && findParser(lines, next, depth) === parseParagraph) next += 1;
  return [create("p", { className: "line" }, ...parseInline(lines.slice(at, next).join("\n").trim(), depth)), next];
}

/** Return the nodes of one paragraph's text. */
function parseInline(text, depth) {
  const nodes = [];
  let plain = "";
  let at = 0;
  SPECIAL.lastIndex = 0;
  for (let match = SPECIAL.exec(text); match; match = SPECIAL.exec(text)) {
    if (match.index < at) continue;
    plain += text.slice(at, match.index);
    const [node, next] = parseSpan(text, match.index, depth);
    if (node instanceof Node) {
      if (plain) nodes.push(document.createTextNode(plain));
      nodes.push(node);
      plain = "";
    } else {
      plain += node;
    }
    at = SPECIAL.lastIndex = next;
  }
  plain += text.slice(at);
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/** Return the element or text at a special character, and the position after it. */
function parseSpan(text, at, depth) {
  const letter = text[at];
  let span = null;
  if (letter === "\\" && ESCAPABLE.includes(text[at + 1] ?? " ")) return [text[at + 1], at + 2];
  if (letter === "`") return parseCodeSpan(text, at);
  if (letter === "[") span = parseLink(text, at, at, depth);
  else if (letter === "!") span = parseLink(text, at + 1, at, depth);
  else if (letter === "h") span = parseBareLink(text, at);
  else if (depth < MAX_DEPTH) span = parseEmphasis(text, at, depth);
  return span ?? [letter, at + 1];
}

function findEnd(text, mark, from) {
  const end = text.slice(from, from + MAX_SPAN).indexOf(mark);
  return end < 0 ? -1 : from + end;
}

function parseCodeSpan(text, at) {
  const mark = /^`+/.exec(text.slice(at, at + MAX_SPAN))[0];
  const begin = at + mark.length;
  let end = findEnd(text, mark, begin);
  while (end >= 0 && text[end + mark.length] === "`") {
    let after = end + mark.length;
    while (text[after] === "`") after += 1;
    end = findEnd(text, mark, after);
  }
  if (end < 0 || mark.length > 8) return [mark, begin];
  return [create("code", {}, text.slice(begin, end)), end + mark.length];
}

function parseLink(text, bracket, from, depth) {
  const middle = findEnd(text, "](", bracket + 1);
  const end = middle < 0 ? -1 : findEnd(text, ")", middle + 2);
  if (end < 0) return null;
  const label = text.slice(bracket + 1, middle);
  const target = text.slice(middle + 2, end).trim().split(/\s/, 1)[0];
  if (!SAFE_LINK.test(target) || depth >= MAX_DEPTH || label.includes("\n\n")) return null;
  return [createLink(target, label || target), end + 1];
}

function parseBareLink(text, at) {
  const found = /^https?:\/\/[^\s<>"`]+/.exec(text.slice(at, at + MAX_SPAN))?.[0].replace(/[.,;:!?)\]*_]+$/, "");
  return found && SAFE_LINK.test(found) && found.length > 9 ? [createLink(found, found), at + found.length] : null;
}

function createLink(target, label) {
  return create("a", { href: target, title: target, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}

function parseEmphasis(text, at, depth) {
  const letter = text[at];
  const double = text[at + 1] === letter;
  if (letter === "~" && !double) return null;
  const mark = double ? letter + letter : letter;
  const begin = at + mark.length;
  const end = findEnd(text, mark, begin);
  if (end <= begin || /\s/.test(text[begin]) || /\s/.test(text[end - 1])) return null;
  const inWord = /\w/.test(text[at - 1] ?? " ") || /\w/.test(text[end + mark.length] ?? " ");
  if (letter === "_" && inWord) return null;
  const tag = letter === "~" ? "s" : double ? "strong" : "em";
  return [create(tag, {}, ...parseInline(text.slice(begin, end), depth + 1)), end + mark.length];
}

/** Shows Markdown that grows: every update renders the last block again, and the blocks before it stay. */
class MarkdownView {
  #element;
  #done = 0; // characters in blocks that do not change any more
  #fixed = 0; // number of their elements

  constructor(element) {
    this.#element = element;
  }

  /** Show a text that begins with the text of the last update. */
  update(text) {
    const lines = text.slice(this.#done).split("\n");
    const blocks = parseBlocks(lines);
    while (this.#element.childNodes.length > this.#fixed) this.#element.lastChild.remove();
    this.#element.append(...blocks.map((block) => block.node));
    if (blocks.length > 1) {
      const last = blocks[blocks.length - 1].line;
      for (const line of lines.slice(0, last)) this.#done += line.length + 1;
      this.#fixed += blocks.length - 1;
    }
  }
}
