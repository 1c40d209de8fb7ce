"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const found = document.getElementById("found");

  // Labels are strings of strangers: they enter the page as text, never as markup.
  const fact = (name, value) => {
    const box = document.createElement("div"), term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value === null || value === undefined ? "–" : String(value);
    box.append(term, text);
    return box;
  };

  document.getElementById("index").addEventListener("input", (event) => {
    const words = event.target.value.trim();
    found.replaceChildren();
    if (!words) return;
    const index = /^\d+$/.test(words) ? Number(words) : -1;
    if (index < 0 || index >= data.n) {
      found.append(fact("nothing", `there is no example ${words}: they are 0 to ${data.n - 1}`));
      return;
    }
    const place = data.indices === null ? index : data.indices.indexOf(index);
    if (place < 0) {
      found.append(fact("not on this page", "of so many examples only some are kept here; history.table() has all"));
      return;
    }
    found.append(fact("example", index));
    for (const [name, column] of Object.entries(data.columns)) found.append(fact(name, column[place]));
    if (data.labels) found.append(fact("label", data.names[data.labels[place]]));
  });

  // A cell that a spreadsheet would take for a formula begins with an apostrophe.
  const cell = (value) => {
    const text = String(value ?? "");
    return '"' + (/^[=+\-@\t\r]/.test(text) ? "'" + text : text).replaceAll('"', '""') + '"';
  };

  document.getElementById("export").addEventListener("click", () => {
    const rows = [["index", "label", "suspicion", "reason"], ...data.suspects];
    const blob = new Blob([rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n"], { type: "text/csv" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = "suspects.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
})();
