// Numbers as text.

export const whole = (value: number) => Math.round(value).toLocaleString("en");

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value === 0) return "0";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 2 : 1)} ms`;
  if (value < 60) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return value < 3600 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${(value / 3600).toFixed(1)} h`;
}

export const percent = (share: number) => `${Math.round(share * 100)}%`;

// "1 block", "2 blocks".
export const count = (number: number, noun: string) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

export function bytes(value: number): string {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return `${value < 10 && unit ? value.toFixed(1) : whole(value)} ${units[unit]}`;
}

// A model's name without the folders in front of it.
export const shortName = (name: string) => name.replace(/\/+$/, "").split("/").at(-1) || name;
