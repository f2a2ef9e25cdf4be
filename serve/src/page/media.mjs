// Pictures and sounds: read from files, shown, and as parts of a message.

/// The server takes bodies of 32 MB, and base64 makes four bytes of three.
export const MOST_BYTES = 20 << 20;

export const kindOf = (type, senses) => ["image", "audio"].find((kind) => senses.includes(kind) && type.startsWith(kind + "/"));

export const read = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

/// As the page shows it. What was not kept over a reload has a name alone.
export function shown({ kind, url, name }) {
  const frame = document.createElement("div");
  frame.className = "medium";
  if (!url) {
    frame.classList.add("not-kept");
    frame.textContent = `${name} (not kept over a reload)`;
    return frame;
  }
  const view = document.createElement(kind === "image" ? "img" : "audio");
  Object.assign(view, { src: url, title: name }, kind === "image" ? { alt: name } : { controls: true });
  frame.append(view);
  return frame;
}

/// As the server takes it.
export function part({ kind, url, name }) {
  if (!url) return { type: "text", text: `[${kind} ${name}, which is no longer here]` };
  if (kind === "image") return { type: "image_url", image_url: { url } };
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: url.match(/^data:audio\/(?:x-)?(\w+)/)?.[1] ?? "wav" } };
}
