// Numbers as words: bytes, shares and seconds, for the page's text. The same rules as memfit on a terminal.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function byteUnit(numBytes) {
  let unit = 0;
  while (Math.abs(numBytes) >= 1024 ** (unit + 1) && unit < BYTE_UNITS.length - 1) unit += 1;
  return unit;
}

function bytesText(numBytes) {
  const unit = byteUnit(numBytes);
  if (unit === 0) return `${numBytes} B`;
  const size = numBytes / 1024 ** unit;
  return `${size.toFixed(Math.abs(size) >= 10 ? 1 : 2)} ${BYTE_UNITS[unit]}`;
}

function exactBytesText(numBytes) {
  return `${numBytes.toLocaleString("en")} bytes`;
}

function hostText(point) {
  return `${bytesText(point.host_bytes)} on the host`;
}

function rateText(bytesPerSecond) {
  return `${(bytesPerSecond / 1e9).toPrecision(3)} GB/s`;
}

function shareText(share) {
  const percent = 100 * share;
  const digits = Math.abs(percent) >= 10 || percent === 0 ? 0 : Math.abs(percent) >= 1 ? 1 : 2;
  return `${percent.toFixed(digits)} %`.replace("-", "−");
}

function slowerText(overhead) {
  return overhead > 0 ? `+${shareText(overhead)}` : shareText(overhead);
}

function numberText(number) {
  return number >= 100 ? Math.round(number).toLocaleString("en") : String(Number(number.toPrecision(3)));
}

function secondsText(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(1e3 * seconds).toFixed(1)} ms` : `${(1e6 * seconds).toFixed(0)} µs`;
}

function flopsText(flops) {
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let place = 0;
  while (flops >= 1000 && place < prefixes.length - 1) {
    flops /= 1000;
    place += 1;
  }
  return `${flops.toPrecision(3)} ${prefixes[place]}FLOPs`;
}
