// The strip of suggestions on a touch screen: gestures on it, and the keyboard that it stands above. It does not know what
// is suggested.

/** The suggestions are a strip of chips on touch screens. */
export const touch = matchMedia("(pointer: coarse)");
const LONG_PRESS_MS = 400;
const SWIPE_PX = 24;
/** A page that is lower by this much than it has been at its width has lost the space to the keyboard. */
const MIN_KEYBOARD_PX = 120;

/**
 * A long press or a swipe up shows the chips of the strip whole.
 * @param {HTMLElement} list
 * @param {() => void} show
 */
export function expandOnGesture(list, show) {
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  let timer;
  let down = { clientY: 0, timeStamp: 0 };
  let isGesture = false;
  const expand = () => {
    isGesture = true;
    show();
  };
  list.addEventListener("pointerdown", (event) => {
    down = event;
    isGesture = false;
    timer = setTimeout(expand, LONG_PRESS_MS);
  });
  list.addEventListener("pointermove", ({ clientY }) => down.clientY - clientY >= SWIPE_PX && expand());
  for (const name of ["pointerup", "pointercancel"]) list.addEventListener(name, () => clearTimeout(timer));
  // On a busy page the timer is late.
  list.addEventListener("pointerup", ({ timeStamp }) => timeStamp - down.timeStamp >= LONG_PRESS_MS && expand());
  // What a finger rests on is read, not accepted. Unless prevented here, the click goes to what the expanded strip has
  // moved under the finger. A mouse has no `touchend`.
  list.addEventListener("touchend", (event) => isGesture && event.cancelable && event.preventDefault());
  list.addEventListener("click", (event) => isGesture && event.stopImmediatePropagation(), { capture: true });
  list.addEventListener("contextmenu", (event) => event.preventDefault());
}

/**
 * Keep the strip above a keyboard that covers the page, as on iOS; the status line yields to any keyboard (style.css).
 * @param {VisualViewport} viewport
 */
export function followKeyboard(viewport) {
  /** Greatest height of the page, by its width. @type {Map<number, number>} */
  const heights = new Map();
  const measure = () => {
    const { height, offsetTop, scale } = viewport;
    if (scale !== 1) return; // zoomed
    const coveredPx = Math.max(0, innerHeight - height - offsetTop);
    const wholePx = Math.max(innerHeight, heights.get(innerWidth) ?? 0);
    heights.set(innerWidth, wholePx);
    document.body.classList.toggle("is-keyboard-open", touch.matches && wholePx - height >= MIN_KEYBOARD_PX);
    document.documentElement.style.setProperty("--keyboard-height", `${Math.round(coveredPx)}px`);
  };
  viewport.addEventListener("resize", measure);
  viewport.addEventListener("scroll", measure);
  measure();
}
