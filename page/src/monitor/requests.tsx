// The table of unfinished requests, the oldest first. Each can be opened and cancelled.

import { useState } from "preact/hooks";
import { count, percent, seconds, whole } from "../format";
import { cancelRequest, opened } from "./detail";

export interface Row {
  id: string; index: number; tenant: string; state: string; age: number; prompt_tokens: number; output_tokens: number;
  blocks: number; tokens: number; kept: number; windows: number; preemptions: number; cached_tokens: number;
}

const FEW = 8;
const COLUMNS: [label: string, value: (row: Row) => string][] = [
  ["Key", row => row.tenant || "–"], ["State", row => row.state === "waiting" && row.preemptions ? "waiting (preempted)" : row.state],
  ["Age", row => seconds(row.age)], ["Prompt", row => whole(row.prompt_tokens)], ["Output", row => whole(row.output_tokens)],
  ["Blocks", row => whole(row.blocks)], ["KV kept", row => row.blocks && row.tokens ? percent(row.kept / row.tokens) : "–"],
  ["Windows", row => whole(row.windows)], ["Preempted", row => whole(row.preemptions)], ["Cached", row => whole(row.cached_tokens)],
];

export function Requests({ rows, total, ownKey }: { rows: Row[]; total: number; ownKey: string }) {
  const [showsAll, setShowsAll] = useState(false);
  const sorted = [...rows].sort((a, b) => b.age - a.age), shown = showsAll ? sorted : sorted.slice(0, FEW);
  const unlisted = total > rows.length ? `, of which ${rows.length} are listed` : "";
  return (
    <section class="wide" aria-labelledby="requests-title">
      <h3 id="requests-title">Requests</h3>
      <p id="requests-summary" class="note">{total ? `${count(total, "sequence")} unfinished${unlisted}.` : "No requests."}</p>
      <table id="requests" hidden={!rows.length}>
        <thead><tr><th scope="col">Request</th>{COLUMNS.map(([label]) => <th scope="col">{label}</th>)}<th scope="col"><span class="hidden">Action</span></th></tr></thead>
        <tbody>{shown.map(row => <RequestRow key={`${row.id} ${row.index}`} row={row} isOwn={row.tenant === ownKey} />)}</tbody>
      </table>
      {rows.length > FEW && <button type="button" onClick={() => setShowsAll(!showsAll)}>{showsAll ? "Show fewer" : `Show all ${rows.length}`}</button>}
    </section>
  );
}

function RequestRow({ row, isOwn }: { row: Row; isOwn: boolean }) {
  const [problem, setProblem] = useState(""), [isSent, setSent] = useState(false);
  const title = row.index ? `${row.id} #${row.index}` : row.id;
  const cancel = async () => {
    setSent(true);
    const failure = await cancelRequest(row.id);
    if (failure) { setSent(false); setProblem(failure); }
  };
  return (
    <tr>
      <td data-label="Request"><button type="button" class="link" onClick={() => { opened.value = row.id; }}>{title}</button></td>
      {COLUMNS.map(([label, value]) => <td data-label={label}>{value(row)}</td>)}
      <td data-label="">{isOwn && <button type="button" aria-label={`Cancel ${title}`} title={problem} disabled={isSent} onClick={cancel}>Cancel</button>}</td>
    </tr>
  );
}
