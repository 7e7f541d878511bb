(() => {
  const channels = colour => colour.match(/[\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = channels(colour).map(
      c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  const contrast = text => {
    const colours = [getComputedStyle(text).fill, paper];
    // Names within a timeline are dark on a light colour of their own, in light and in dark.
    if (colours[0] === 'rgb(17, 17, 17)') return 21;
    const [low, high] = colours.map(light).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const shown = [...document.querySelectorAll('PICTURES')].filter(
    one => !one.closest('details:not([open])'));
  const texts = shown.flatMap(one => [...one.querySelectorAll('text')]);
  const worst = (figures, name) => {
    const found = texts.map((text, n) => [figures[n], text.textContent]);
    return found.sort((a, b) => a[0] - b[0])[0] ?? null;
  };
  return {
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    paper: light(paper),
    letters: worst(texts.map(text =>
      parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)),
    contrast: worst(texts.map(contrast)),
    cut: texts.filter(text => {
      const b = text.getBBox(), all = text.ownerSVGElement.viewBox.baseVal;
      return all.width && (b.x < -1 || b.y < -1 || b.x + b.width > all.width + 1
        || b.y + b.height > all.height + 1);
    }).map(text => text.textContent),
    keys: [...document.querySelectorAll('.key i')].filter(
      key => key.getBoundingClientRect().width < 5).length,
    pictures: shown.map(one => {
      const box = one.getBoundingClientRect();
      return [box.x + scrollX, box.y + scrollY, box.width, box.height];
    }),
  };
})()
