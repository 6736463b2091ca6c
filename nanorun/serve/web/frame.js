// Scrolling and the drawer. The page follows the end of a growing answer unless the user has scrolled up. The drawer
// with the list is beside the messages, or over them on a narrow screen.

import { $ } from "./dom.js";

const NEAR = 60; // pixels from the end that count as the end
export const narrow = matchMedia("(max-width: 767px)");

const scroll = $("scroll");
const fromEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
let follow = true;
let touched = false; // the user touches the screen
let top = 0;

export function toEnd() {
  follow = true;
  keepUp();
}

export function keepUp() {
  if (!follow || touched) return;
  scroll.scrollTop = scroll.scrollHeight;
  top = scroll.scrollTop;
}

scroll.addEventListener("scroll", () => {
  if (scroll.scrollTop < top && fromEnd() > 4) follow = false;
  else if (scroll.scrollTop > top && fromEnd() <= NEAR) follow = true;
  top = scroll.scrollTop;
  $("newest").hidden = fromEnd() <= NEAR;
});

new ResizeObserver(keepUp).observe(scroll); // a toast or a longer question leaves less room

scroll.addEventListener(
  "wheel",
  ({ deltaY }) => {
    if (deltaY < 0 && scroll.scrollHeight > scroll.clientHeight) follow = false;
  },
  { passive: true },
);

for (const [name, on] of Object.entries({ touchstart: true, touchend: false, touchcancel: false })) {
  scroll.addEventListener(name, () => (touched = on), { passive: true });
}

export function scrollPage(direction) {
  scroll.scrollBy(0, direction * scroll.clientHeight * 0.9);
}

$("newest").addEventListener("click", () => {
  toEnd();
  $("text").focus();
});

export function openDrawer() {
  document.body.classList.add("drawer-open");
  document.body.classList.remove("drawer-closed");
  showDrawer();
}

export function closeDrawer() {
  if (!narrow.matches) return;
  document.body.classList.remove("drawer-open");
  showDrawer();
}

export function toggleDrawer() {
  document.body.classList.toggle(narrow.matches ? "drawer-open" : "drawer-closed");
  showDrawer();
  if (narrow.matches && isDrawerOpen()) $("new").focus();
}

export const isDrawerOpen = () =>
  narrow.matches
    ? document.body.classList.contains("drawer-open")
    : !document.body.classList.contains("drawer-closed");

export function showDrawer() {
  const over = narrow.matches && isDrawerOpen();
  $("drawer").inert = !isDrawerOpen();
  for (const part of $("main").children) part.inert = over && part !== $("toast");
  $("menu").setAttribute("aria-expanded", String(isDrawerOpen()));
}

narrow.addEventListener("change", () => {
  document.body.classList.remove("drawer-open");
  showDrawer();
});
