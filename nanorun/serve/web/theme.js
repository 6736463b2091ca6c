// Applies the chosen theme before the first paint, so that the page does not flash in the other one.
try {
  const { theme } = JSON.parse(localStorage.getItem("nanorun:settings")) ?? {};
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Nothing stored, or unreadable: the system's theme.
}
