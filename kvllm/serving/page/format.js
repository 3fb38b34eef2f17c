// Numbers as text.

export const whole = value => Math.round(value).toLocaleString("en");

export function seconds(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value === 0) return "0";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 2 : 1)} ms`;
  if (value < 60) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return value < 3600 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${(value / 3600).toFixed(1)} h`;
}

export const percent = share => `${Math.round(share * 100)}%`;

// "1 block", "2 blocks".
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
