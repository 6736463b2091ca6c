// Before the first paint: the theme that was chosen, so that the page does not flash in the other one.
try {
  const { theme } = JSON.parse(localStorage.getItem("nanorun:settings")) ?? {};
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Nothing kept, or nothing that can be read: the system's theme.
}
