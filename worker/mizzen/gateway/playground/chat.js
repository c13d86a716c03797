// The chat: settings, requests to the API of the gateway that served this page, and the conversation.

const element = (id) => document.getElementById(id);
const [modelChoice, modelsProblem, keyField, systemField] = ["model", "models-problem", "key", "system"].map(element);
const [temperatureField, limitField] = ["temperature", "max-tokens"].map(element);
const [conversation, composer, promptField] = ["conversation", "composer", "prompt"].map(element);
const [sendButton, stopButton, announcement] = ["send", "stop", "announcement"].map(element);
const [settings, welcome] = ["settings", "welcome"].map(element);

// The page may be served behind a path prefix, and with a slash at the end of its path.
const API = `${location.pathname.replace(/\/playground\/*$/, "")}/v1/`;
const SHOWN_PIXELS = 80; // distance from the end within which the conversation follows an answer

/** An error as the API describes it, or the reason why there is no answer from the API. */
class ApiProblem extends Error {
  constructor(message, details = "", status = 0) {
    super(message);
    this.details = details;
    this.status = status;
  }
}

function describeError(status, body, retryAfter = null) {
  const error = body?.error;
  const message = error?.message ?? `The server answered with HTTP status ${status}.`;
  const parts = [status ? `HTTP ${status}` : "", error?.code ?? error?.type ?? ""];
  if (error?.param) parts.push(`parameter ${error.param}`);
  if (retryAfter) parts.push(`try again in ${retryAfter} s`);
  return new ApiProblem(message, parts.filter(Boolean).join(" · "), status);
}

async function callApi(path, options = {}) {
  const headers = { ...options.headers };
  const key = keyField.value.trim();
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(API + path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const text = /[^\x20-\x7e]/.test(key) ? "The API key contains a character that no key has." : "The gateway cannot be reached.";
    throw new ApiProblem(text, error.message);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw describeError(response.status, body, response.headers.get("retry-after"));
}

/** Yield the JSON objects of a stream of server-sent events until [DONE]. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ApiProblem("The connection was lost before the end of the answer.", error.message);
    });
    if (done) throw new ApiProblem("The answer ended early.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw describeError(0, parsed);
      yield parsed;
    }
  }
}

// Models

let modelRequests = 0;

async function loadModels() {
  const request = (modelRequests += 1);
  let names = [];
  let problem = "";
  try {
    names = (await (await callApi("models")).json()).data.map((model) => model.id);
    if (!names.length) problem = "The gateway serves no model that this key may use.";
  } catch (error) {
    problem = error.message;
    if (error.status === 401) showSettings(true);
  }
  if (request !== modelRequests) return;
  const chosen = modelChoice.value;
  modelChoice.replaceChildren(...names.map((name) => create("option", { value: name }, name)));
  if (names.includes(chosen)) modelChoice.value = chosen;
  modelChoice.disabled = !names.length;
  modelsProblem.textContent = problem;
  modelsProblem.hidden = !problem;
  updateControls();
}

// Conversation: turns of a question and its answer

const turns = [];
let running = null; // AbortController of the request in progress

/** Return the messages to send; questions without any answer are left out. */
function messagesOf(question) {
  const system = systemField.value.trim();
  const messages = system ? [{ role: "system", content: systemField.value }] : [];
  for (const turn of turns) {
    if (turn.text) messages.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.text });
  }
  return [...messages, { role: "user", content: question }];
}

function requestBody(question) {
  const body = { model: modelChoice.value, messages: messagesOf(question), stream: true };
  body.stream_options = { include_usage: true, continuous_usage_stats: true };
  if (temperatureField.value !== "") body.temperature = Number(temperatureField.value);
  if (limitField.value !== "") body.max_tokens = Number(limitField.value);
  return body;
}

/** An answer on the page, while it arrives and afterwards. */
class Answer {
  constructor(model) {
    this.text = "";
    this.reasoning = "";
    this.usage = null;
    this.finish = "";
    this.begun = performance.now();
    this.first = this.last = this.contentBegun = 0;
    this.thought = null;
    this.body = create("div", { className: "answer waiting" });
    this.stats = create("div", { className: "stats" });
    this.article = create("article", { className: "assistant", "aria-busy": "true", "aria-label": `Answer of ${model}` });
    this.article.append(create("p", { className: "author" }, model), this.body, this.stats);
    this.view = new MarkdownView(this.body);
    this.scheduled = false;
  }

  /** Add an event of the stream. */
  add(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (!content && !reasoning) return;
    this.last = performance.now();
    this.first ||= this.last;
    if (reasoning) this.addReasoning(reasoning);
    if (content) {
      this.contentBegun ||= this.last;
      this.text += content;
    }
    this.scheduleDraw();
  }

  addReasoning(piece) {
    if (!this.thought) {
      this.thought = document.createTextNode("");
      this.summary = create("summary", {}, "Reasoning …");
      this.details = create("details", { className: "reasoning", open: true }, this.summary, create("p", {}, this.thought));
      this.summary.addEventListener("click", () => (this.chosen = true));
      this.body.before(this.details);
    }
    this.reasoning += piece;
  }

  scheduleDraw() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      if (!this.finished) this.draw(); // `end` has drawn everything
    });
  }

  draw() {
    const follow = isAtEnd();
    if (this.thought) this.drawReasoning();
    if (this.text) {
      this.body.classList.remove("waiting");
      this.view.update(this.text);
    }
    this.drawStats();
    if (follow) scrollToEnd();
  }

  drawReasoning() {
    this.thought.appendData(this.reasoning.slice(this.thought.length));
    const ended = this.contentBegun || (this.finished ? this.last : 0);
    if (!ended || this.collapsed) return;
    this.collapsed = true;
    this.summary.textContent = `Reasoning, ${formatSeconds(ended - this.first)}`;
    if (!this.chosen) this.details.open = false;
  }

  drawStats() {
    const stats = [];
    if (this.finished && this.text) stats.push(copyButton(() => this.text));
    if (this.usage) stats.push(`${this.usage.prompt_tokens} prompt tokens`, `${this.usage.completion_tokens} answer tokens`);
    const rate = this.usage && (this.usage.completion_tokens - 1) / ((this.last - this.first) / 1000);
    if (rate > 0 && Number.isFinite(rate)) stats.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
    if (this.first) stats.push(`first token after ${formatSeconds(this.first - this.begun)}`);
    const ending = { length: "stopped at the limit of tokens", stopped: "stopped" }[this.finish];
    if (ending) stats.push(ending);
    this.stats.replaceChildren(...stats.map((stat) => (stat instanceof Node ? stat : create("span", {}, stat))));
  }

  /** End the answer, with the error that ended it early, if any. */
  end(problem, retry) {
    const follow = isAtEnd();
    this.finished = true;
    this.article.setAttribute("aria-busy", "false");
    this.body.classList.remove("waiting");
    this.draw();
    if (problem) {
      const again = create("button", { type: "button" }, "Try again");
      again.addEventListener("click", retry);
      const details = problem.details ? [create("p", { className: "hint" }, problem.details)] : [];
      this.stats.before(create("div", { className: "failure" }, create("p", {}, problem.message), ...details));
      this.stats.prepend(again);
    }
    if (follow) scrollToEnd();
  }
}

async function ask(question) {
  const controller = (running = new AbortController());
  const answer = new Answer(modelChoice.value);
  const turn = { question, text: "" };
  const asked = create("article", { className: "user", "aria-label": "Your message" }, question);
  const body = JSON.stringify(requestBody(question));
  welcome.remove();
  conversation.append(asked, answer.article);
  turns.push(turn);
  scrollToEnd();
  updateControls();
  announce("The model answers.");
  let problem = null;
  try {
    const options = { method: "POST", body, headers: { "content-type": "application/json" }, signal: controller.signal };
    for await (const event of readEvents(await callApi("chat/completions", options))) answer.add(event);
  } catch (error) {
    if (controller.signal.aborted) answer.finish = "stopped";
    else problem = error instanceof ApiProblem ? error : new ApiProblem("The answer cannot be read.", String(error));
  }
  turn.text = answer.text;
  answer.end(problem, () => {
    if (running || !turns.includes(turn)) return;
    turns.splice(turns.indexOf(turn), 1);
    asked.remove();
    answer.article.remove();
    ask(question);
  });
  if (running !== controller) return; // a new chat began meanwhile
  running = null;
  const focused = document.activeElement === stopButton;
  updateControls();
  if (focused) promptField.focus();
  announce(problem ? problem.message : "The answer is complete.");
  if (problem?.status === 401) loadModels();
}

function isAtEnd() {
  return conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < SHOWN_PIXELS;
}

function scrollToEnd() {
  conversation.scrollTop = conversation.scrollHeight;
}

// Controls

const touch = matchMedia("(pointer: coarse)").matches;

function updateControls() {
  stopButton.hidden = !running;
  sendButton.hidden = Boolean(running);
  sendButton.disabled = !promptField.value.trim() || !modelChoice.value;
}

function showSettings(open) {
  settings.classList.toggle("open", open);
  element("toggle-settings").setAttribute("aria-expanded", String(open));
}

function announce(text) {
  announcement.textContent = text;
}

function fitPrompt() {
  promptField.style.height = "auto";
  promptField.style.height = `${promptField.scrollHeight + 2}px`;
}

function formatSeconds(milliseconds) {
  return `${(milliseconds / 1000).toFixed(milliseconds < 9950 ? 2 : 1)} s`;
}

function copyButton(text) {
  const button = create("button", { type: "button", className: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(text())) ? "Copied" : "Cannot copy";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/** Copy a text; browsers offer the clipboard's API only to pages from https:// or localhost. */
async function copyText(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const area = create("textarea", { className: "unseen", value: text, readOnly: true });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = promptField.value;
  if (running || sendButton.disabled || !settings.reportValidity()) return;
  promptField.value = "";
  fitPrompt();
  if (touch) showSettings(false);
  ask(question);
});

promptField.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch) return;
  event.preventDefault();
  composer.requestSubmit();
});

promptField.addEventListener("input", () => {
  fitPrompt();
  updateControls();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

stopButton.addEventListener("click", () => running?.abort());
settings.addEventListener("submit", (event) => event.preventDefault());
element("toggle-settings").addEventListener("click", () => showSettings(!settings.classList.contains("open")));

let keyTimer = 0;
keyField.addEventListener("input", () => {
  clearTimeout(keyTimer);
  keyTimer = setTimeout(loadModels, 300);
});

element("new-chat").addEventListener("click", () => {
  running?.abort();
  running = null;
  turns.length = 0;
  conversation.replaceChildren(welcome);
  updateControls();
  announce("A new chat has begun.");
  promptField.focus();
});

element("prompt-hint").textContent = touch ? "" : "Enter sends, Shift+Enter begins a new line, Esc stops the answer.";
loadModels();
promptField.focus();
