// An answer's Markdown as elements. Markup in the text stays text; what is made is sanitized once more.

import DOMPurify from "dompurify";
import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { Marked, type Token, type TokenizerAndRendererExtension } from "marked";
import temml from "temml";

const LANGUAGES = { bash, c, cpp, css, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

const LONGEST_BLOCK = 100_000;  // characters; a longer one is shown as it is
const MOST_FORMULAS = 200;
const LONGEST_CODE = 20_000;  // characters that are highlighted
const HARMLESS = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i;
const SAFE_LINK = /^(https?:|mailto:)/i;

const escape = (text: string) => text.replace(/[&<>"']/g, mark => `&#${mark.charCodeAt(0)};`);

const formulas = new Map<string, string>();  // a paragraph that grows has the same ones again and again

function maths(source: string, displayMode: boolean): string {
  const name = `${displayMode} ${source}`, known = formulas.get(name);
  if (known !== undefined) return known;
  if (formulas.size >= MOST_FORMULAS) formulas.clear();
  const made = newMaths(source, displayMode);
  formulas.set(name, made);
  return made;
}

function newMaths(source: string, displayMode: boolean): string {
  try {
    const made = temml.renderToString(source, { displayMode, throwOnError: true, trust: false, maxExpand: 500, maxSize: [30, 10] });
    // The page's policy allows no styles in markup.
    return made.replace(/ style="[^"]*"/g, "");
  } catch {
    return `<code>${escape(source)}</code>`;
  }
}

function mathRule(name: string, level: "block" | "inline", start: RegExp, rule: RegExp): TokenizerAndRendererExtension {
  return {
    name, level,
    start: text => { const at = text.search(start); return at < 0 ? undefined : at; },
    tokenizer(text) {
      const match = rule.exec(text);
      return match ? { type: name, raw: match[0], text: (match[1] ?? match[2]).trim() } : undefined;
    },
    renderer: token => level === "block" ? `<p class="maths" tabindex="0" role="group" aria-label="formula">${maths(token.text, true)}</p>` : maths(token.text, false),
  };
}

const marked = new Marked({
  gfm: true,
  extensions: [
    mathRule("displayMaths", "block", /\$\$|\\\[/, /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])(?:\n|$)/),
    mathRule("inlineMaths", "inline", /\$|\\\(/, /^(?:\$\$?(?!\s)((?:\\.|[^$\\\n`])+?)(?<!\s)\$\$?(?!\d)|\\\(([^]+?)\\\))/),
  ],
  renderer: {
    html: ({ text }) => HARMLESS.test(text.trim()) ? text : escape(text),
    image: ({ href, text }) => link(href, `picture: ${text || href}`),
    link({ href, tokens }) { return link(href, this.parser.parseInline(tokens).replace(/<\/?a\b[^>]*>/g, ""), true); },  // a picture is a link, too
    code: ({ text, lang }) => code(text, (lang ?? "").split(/\s/)[0].toLowerCase()),
    table(token) {
      const cells = (row: typeof token.header, tag: string) => row.map(cell =>
        `<${tag}${cell.align ? ` class="${cell.align}"` : ""} dir="auto">${this.parser.parseInline(cell.tokens)}</${tag}>`).join("");
      const rows = token.rows.map(row => `<tr>${cells(row, "td")}</tr>`).join("");
      return `<div class="table" tabindex="0" role="group" aria-label="table"><table><thead><tr>${cells(token.header, "th")}</tr></thead><tbody>${rows}</tbody></table></div>`;
    },
    checkbox: ({ checked }) => checked ? "☑ " : "☐ ",
  },
});

function link(href: string, content: string, isMarkup = false): string {
  const shown = isMarkup ? content : escape(content);
  return SAFE_LINK.test(href) ? `<a href="${escape(href)}" target="_blank" rel="noopener noreferrer nofollow">${shown}</a>` : shown;
}

function code(text: string, language: string): string {
  const known = hljs.getLanguage(language) && text.length <= LONGEST_CODE;
  const shown = known ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escape(text);
  return `<pre class="code" tabindex="0" data-language="${escape(language)}"><code>${shown}</code></pre>`;
}

// Markup that is nested too deep for the stack is one block, and is shown as it is.
function lex(text: string): Token[] {
  try { return marked.lexer(text); } catch { return [{ type: "text", raw: text, text }]; }
}

function parse(source: string): string {
  if (source.length <= LONGEST_BLOCK) try { return marked.parse(source, { async: false }); } catch { /* as above */ }
  return `<pre>${escape(source)}</pre>`;
}

// The blocks of a text: paragraphs, lists, tables and so on. Where a text has grown, blocks before its end are kept.
export class Blocks {
  private text = "";
  private tokens: Token[] = [];

  update(text: string): string[] {
    text = text.replace(/\r\n?/g, "\n");
    let kept: Token[] = [];
    if (this.text && text.startsWith(this.text)) {
      // What follows may still belong to the last blocks.
      kept = this.tokens.slice(0, -1);
      while (kept.length && kept.at(-1)!.type === "space") kept.pop();
      kept.pop();
    }
    const offset = kept.reduce((sum, token) => sum + token.raw.length, 0);
    this.tokens = [...kept, ...lex(text.slice(offset))];
    this.text = this.tokens.reduce((sum, token) => sum + token.raw.length, 0) === text.length ? text : "";
    return this.tokens.filter(token => token.type !== "space" && token.type !== "def").map(token => token.raw);
  }
}

export function render(source: string): DocumentFragment {
  const made = DOMPurify.sanitize(parse(source), {
    USE_PROFILES: { html: true, mathMl: true }, FORBID_TAGS: ["style", "form", "input", "button", "img", "annotation-xml"],
    FORBID_ATTR: ["style", "id", "name"], ADD_ATTR: ["target"], RETURN_DOM_FRAGMENT: true,
  });
  for (const block of made.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, blockquote, ul, ol")) block.setAttribute("dir", "auto");
  return made;
}
