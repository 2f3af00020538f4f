// A plain textarea with a list of suggestions.

import { attachTextarea } from "tercet-client/textarea";
import { onKey, options } from "./options.js";

const textarea = document.createElement("textarea");
const list = document.createElement("ol");
document.body.prepend(textarea, list);
const { detach } = attachTextarea(textarea, { ...options, list });
onKey("F8", detach);
