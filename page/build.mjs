// Builds the page into kvllm/serving/page/: one script, one style sheet, the licences of the libraries within.

import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";

const OUT = "../kvllm/serving/page";

// A digest of all that the page is made from: a test compares it with the sources.
function digest() {
  const listed = readdirSync("src", { recursive: true, withFileTypes: true }).filter(each => each.isFile())
    .map(each => `${each.parentPath}/${each.name}`);
  const hash = createHash("sha256");
  for (const name of [...listed, "build.mjs", "package.json", "package-lock.json", "tsconfig.json"].sort()) {
    hash.update(`${name}\0`).update(readFileSync(name)).update("\0");
  }
  return hash.digest("hex");
}

rmSync(OUT, { recursive: true, force: true });
mkdirSync(OUT);
await build({
  entryPoints: ["src/main.tsx", "src/style.css"], outdir: OUT, bundle: true, minify: true, format: "esm",
  target: ["chrome111", "firefox115", "safari16.4"], jsx: "automatic", jsxImportSource: "preact", legalComments: "none",
});
const page = readFileSync("src/index.html", "utf8").replace("SOURCES", digest());
writeFileSync(`${OUT}/index.html`, page);
writeFileSync(`${OUT}/icon.svg`, readFileSync("src/icon.svg"));
const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
const names = [...Object.keys(dependencies), "@preact/signals-core"];
const licences = names.sort().map(name => {
  const file = readdirSync(`node_modules/${name}`).find(each => /^licen[cs]e(\.(md|txt))?$/i.test(each));
  return `${name}\n\n${readFileSync(`node_modules/${name}/${file}`, "utf8").trim()}\n`;
});
writeFileSync(`${OUT}/licenses.txt`, licences.join(`\n${"-".repeat(80)}\n\n`));
