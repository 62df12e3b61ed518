// Keeps ages running, and takes each new state of the page from the server. Without this file the
// page is complete, and shows the state at the time of its request.
(() => {
  const offset = Number(document.body.dataset.now) - Date.now() / 1000;
  const ago = (s) =>
    s < 100 ? `${Math.round(s)} s` : s < 6000 ? `${Math.round(s / 60)} min`
      : s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} d`;
  const tick = () => {
    for (const each of document.querySelectorAll("[data-since]"))
      each.textContent = ago(Math.max(0, Date.now() / 1000 + offset - Number(each.dataset.since)));
  };
  setInterval(tick, 1000);

  document.documentElement.classList.add("js");
  const copy = async (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");  // A page without https has no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button || button.dataset.name) return;
    button.dataset.name = button.textContent;
    const say = (text) => {
      button.textContent = text;
      setTimeout(() => { button.textContent = button.dataset.name; delete button.dataset.name; }, 1500);
    };
    copy(button.dataset.copy).then(() => say("copied"), () => say("not copied"));
  });

  const status = document.getElementById("status");
  const parts = () => document.querySelectorAll("[data-live]");
  if (!status || !parts().length) return;
  const say = (state, text) => { status.dataset.state = state; status.textContent = text; };

  // A part in which someone is reading with the keyboard stays as it is until they leave it.
  const refresh = async () => {
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of parts()) {
      const other = fresh.getElementById(part.id);
      if (other && other.innerHTML !== part.innerHTML && !part.contains(document.activeElement))
        part.innerHTML = other.innerHTML;
    }
    tick();
  };

  let shown = document.body.dataset.version;
  const source = new EventSource("/live");
  source.onopen = () => say("on", "connected");
  source.onerror = () => say("off", "no connection");
  source.onmessage = (event) => {
    if (event.data === shown) return;
    shown = event.data;
    refresh().catch(() => say("off", "no connection"));
  };
})();
