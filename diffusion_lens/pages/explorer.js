// The explorer: shows the manifest and the chunks of a page.
export function mountFile(root) {
  const manifest = JSON.parse(document.getElementById("manifest").textContent);
  root.textContent = manifest.title;
}

export default { render({ model, el }) { el.textContent = model.get("manifest").title; } };
