// The plug-in's settings and their tab.

import { type App, PluginSettingTab, SecretComponent, Setting } from "obsidian";
import { MIN_PROBABILITIES } from "tercet-client";

import type TercetPlugin from "./main";

/** Stored in the vault, except for the API key: `secret` is the name that it has in Obsidian's secret storage. */
export interface Settings {
  url: string;
  secret: string;
  isOn: boolean;
  mode: "live" | "pauses";
  /** In live mode, suggestions end where they are less probable. */
  minProbability: number;
  /** In live mode, suggestions expected to save fewer keys are not shown. Of earlier versions; not on the tab any more. */
  minUsefulness: number;
  /** Nothing comes unasked in code, front matter and mathematics. */
  proseOnly: boolean;
  /** Empty: the server's default. */
  model: string;
}

export const DEFAULT_SETTINGS: Settings = {
  url: "http://localhost:8000/", secret: "", isOn: true, mode: "live", minProbability: MIN_PROBABILITIES.normal, minUsefulness: 1,
  proseOnly: true, model: "",
};

const MODES = { live: "At every key: likely next words", pauses: "At pauses: ideas", off: "On request only" };
const EAGERNESS = {
  [MIN_PROBABILITIES.eager]: "Often", [MIN_PROBABILITIES.normal]: "Normal", [MIN_PROBABILITIES.quiet]: "Seldom: those that are almost sure",
};

export class SettingsTab extends PluginSettingTab {
  #plugin;

  constructor(app: App, plugin: TercetPlugin) {
    super(app, plugin);
    this.#plugin = plugin;
  }

  override display(): void {
    const plugin = this.#plugin;
    const { url, secret, isOn, mode, minProbability, proseOnly, model } = plugin.settings;
    this.containerEl.replaceChildren();
    this.#add("Server", `Its setting TERCET_ORIGINS must list ${location.origin}.`).addText((text) =>
      text.setPlaceholder(DEFAULT_SETTINGS.url).setValue(url)
        .onChange((value) => plugin.change({ url: value.trim() || DEFAULT_SETTINGS.url })));
    this.#add("API key", "If the server requires one.").addComponent((element) =>
      new SecretComponent(this.app, element).setValue(secret).onChange((value) => plugin.change({ secret: value })));
    this.#add("Suggest", "The command \"Suggest\" works in every mode.").addDropdown((dropdown) =>
      dropdown.addOptions(MODES).setValue(isOn ? mode : "off").onChange((value) =>
        plugin.change(value === "live" || value === "pauses" ? { isOn: true, mode: value } : { isOn: false })));
    this.#add("Eagerness", "Which likely next words are shown.").addDropdown((dropdown) =>
      dropdown.addOptions(EAGERNESS).setValue(String(minProbability))
        .onChange((value) => plugin.change({ minProbability: Number(value) })));
    this.#add("Only in prose", "Not in code, properties and mathematics, unless you ask.").addToggle((toggle) =>
      toggle.setValue(proseOnly).onChange((value) => plugin.change({ proseOnly: value })));
    this.#add("Model", "Empty: the server's default.").addText((text) =>
      text.setValue(model).onChange((value) => plugin.change({ model: value.trim() })));
  }

  #add(name: string, description: string): Setting {
    return new Setting(this.containerEl).setName(name).setDesc(description);
  }
}
