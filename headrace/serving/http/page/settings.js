/* The panel of settings. A field that the user has not set shows the model's default and is not sent. */

import { make } from "./dom.js";

/* The fields: request field, label, what it does, bounds of its slider or number. `usual`: where the model says nothing. */
const FIELDS = [
  {
    name: "temperature",
    label: "Temperature",
    hint: "0 always takes the most likely token",
    min: 0,
    max: 2,
    step: 0.05,
    usual: 1,
  },
  {
    name: "top_p",
    label: "Top p",
    hint: "samples among the likeliest tokens up to this share",
    min: 0.05,
    max: 1,
    step: 0.05,
    usual: 1,
  },
  {
    name: "max_tokens",
    label: "Longest answer",
    hint: "in tokens",
    min: 1,
    max: 1e6,
    placeholder: "to the end of the context",
  },
  {
    name: "top_k",
    label: "Top k",
    hint: "samples among so many tokens",
    min: 0,
    max: 1e6,
    isRare: true,
    placeholder: "off",
  },
  {
    name: "min_p",
    label: "Min p",
    hint: "leaves out tokens this much less likely than the best",
    min: 0,
    max: 1,
    step: 0.01,
    usual: 0,
    isRare: true,
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    hint: "above 1 repeats less",
    min: 0.5,
    max: 2,
    step: 0.05,
    usual: 1,
    isRare: true,
  },
  {
    name: "seed",
    label: "Seed",
    hint: "the same seed gives the same answer",
    min: 0,
    max: 2 ** 31 - 1,
    isRare: true,
    placeholder: "random",
  },
];

class Field {
  constructor(field, panel) {
    Object.assign(this, field);
    this.isSlider = field.step !== undefined;
    this.panel = panel;
    this.input = make("input", {
      id: field.name,
      type: this.isSlider ? "range" : "number",
      min: field.min,
      max: field.max,
      step: field.step ?? 1,
      "aria-describedby": `${field.name}-hint`,
      inputMode: this.isSlider ? undefined : "numeric",
    });
    this.output = make("output", { htmlFor: field.name });
    this.reset = make("button", {
      type: "button",
      className: "link",
      textContent: "reset",
      "aria-label": `Reset ${field.label} to the model's default`,
      onclick: () => this.change(undefined),
    });
    this.node = make(
      "div",
      { className: "field" },
      make(
        "div",
        { className: "field-head" },
        make("label", { htmlFor: field.name, textContent: field.label }),
        this.reset,
        this.output,
      ),
      this.input,
      make("small", { id: `${field.name}-hint`, textContent: field.hint }),
    );
    this.input.addEventListener("input", () => {
      const number = this.input.valueAsNumber;
      this.change(Number.isFinite(number) && number >= field.min && number <= field.max ? number : undefined, {
        isTyped: true,
      });
    });
  }

  change(value, { isTyped = false } = {}) {
    this.panel.set(this.name, value);
    this.show({ isTyped });
  }

  show({ isTyped = false } = {}) {
    const value = this.panel.values[this.name],
      advised = this.panel.defaults[this.name],
      usual = advised ?? this.usual;
    this.reset.hidden = value === undefined;
    if (this.isSlider) {
      this.input.value = value ?? usual;
      this.output.textContent = value ?? `${usual} (${advised === undefined ? "default" : "the model's"})`;
      return;
    }
    this.input.placeholder = advised === undefined ? this.placeholder : `${advised} (the model's)`;
    if (!isTyped) this.input.value = value ?? "";
  }
}

export class Settings {
  constructor(panel, store) {
    this.store = store;
    this.defaults = {};
    const known = store.settings;
    this.values = {};
    for (const { name } of FIELDS) if (Number.isFinite(known[name])) this.values[name] = known[name];
    if (typeof known.system === "string") this.values.system = known.system;
    this.fields = FIELDS.map((field) => new Field(field, this));
    const common = this.fields.filter((field) => !field.isRare),
      rare = this.fields.filter((field) => field.isRare);
    panel
      .querySelector("#sampling")
      .append(
        ...common.map((field) => field.node),
        make(
          "details",
          {},
          make("summary", { textContent: "More sampling settings" }),
          ...rare.map((field) => field.node),
        ),
      );
    this.system = panel.querySelector("#system");
    this.system.value = this.values.system ?? "";
    this.system.addEventListener("input", () => this.set("system", this.system.value || undefined));
    this.show();
  }

  show() {
    for (const field of this.fields) field.show();
  }

  /* The model's own sampling, by the names of request fields; whatever else is there is ignored. */
  learn(defaults) {
    this.defaults = {};
    for (const { name } of FIELDS) if (Number.isFinite(defaults[name])) this.defaults[name] = defaults[name];
    this.show();
  }

  set(name, value) {
    if (value === undefined) delete this.values[name];
    else this.values[name] = value;
    this.store.settings = this.values;
  }
}
