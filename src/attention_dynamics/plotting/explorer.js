// Moves the bound explorers of a page. Every number was computed before the page was made: here
// they are looked up and drawn. Positions on the logarithmic axis are all the arithmetic there is.
(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";

  const power = (exponent) =>
    "10" + [...String(exponent)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");

  // Three digits, as in 22 900, 0.0158 and 2.29 × 10⁷.
  const number = (value) => {
    if (value >= 1e-3 && value < 1e6) {
      const text = String(Number(value.toPrecision(3)));
      return value < 1e4 ? text : text.replace(/\B(?=(\d{3})+$)/g, "\u202f");
    }
    const [digits, exponent] = value.toExponential(2).split("e");
    return `${digits} × ${exponent === "+0" || exponent === "+1" ? 10 ** exponent : power(Number(exponent))}`;
  };

  const upgrade = (root) => {
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    const form = root.querySelector("form");
    const sliders = [...root.querySelectorAll(".be-slider")];
    const at = { ...data.first }; // the stop at which each slider and choice stands
    const innermost = data.order[data.order.length - 1];

    // The row of the table at these stops.
    const row = (stops) => {
      let node = data.pool[data.root];
      for (const name of data.order.slice(0, -1)) node = data.pool[node[stops[name]]];
      const cells = data.columns.map((name, i) => [name, data.pool[node[i]][stops[innermost]]]);
      return Object.fromEntries(cells);
    };

    // The rows that a slider reaches while everything else stays.
    const reach = (name) => data.stops[name].map((_, i) => row({ ...at, [name]: i }));

    const place = (value, [low, high]) => (Math.log10(value) - low) / (high - low);

    const drawPath = (svg, d, name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", d);
      path.setAttribute("class", name);
      svg.append(path);
    };

    const drawSpark = (svg, rows, index) => {
      const last = Math.max(rows.length - 1, 1);
      const height = (value) => 38 - 36 * place(value, data.spark);
      const points = rows.map((r, i) => `${(100 * i) / last} ${height(r.total)}`);
      svg.replaceChildren();
      svg.setAttribute("viewBox", "0 0 100 40");
      svg.setAttribute("preserveAspectRatio", "none");
      drawPath(svg, `M0 ${height(data.mark)}H100`, "be-level");
      drawPath(svg, `M${points.join("L")}`, "be-profile");
      drawPath(svg, `M${points[index]}h0.01`, "be-dot");
    };

    const draw = () => {
      const now = row(at);
      const states = {
        vacuous: now.total > data.mark, useful: !(now.total > data.mark),
        fast: !!now.fast, paper: !now.fast, large: !now.small,
      };
      for (const part of root.querySelectorAll("[data-when]")) part.hidden = !states[part.dataset.when];
      for (const part of root.querySelectorAll("[data-number]"))
        part.textContent = number(now[part.dataset.number]);
      for (const part of root.querySelectorAll("[data-size]"))
        part.textContent = data.stops[part.dataset.size][at[part.dataset.size]];
      for (const bar of root.querySelectorAll("[data-bar]"))
        bar.style.width = `${(100 * place(now[bar.dataset.bar], data.axis)).toFixed(2)}%`;
      for (const slider of sliders) {
        const name = slider.dataset.axis;
        const rows = reach(name);
        drawSpark(slider.querySelector("svg"), rows, at[name]);
        const same = rows.every((r) => data.columns.every((column) => r[column] === rows[0][column]));
        slider.querySelector(".be-same").hidden = !same;
        const input = slider.querySelector("input");
        const words = input.getAttribute("aria-label").split(", ")[1];
        input.setAttribute("aria-valuetext", `${data.stops[name][at[name]]} ${words}`);
      }
    };

    // One sentence for those who do not see the bars.
    const say = (slider) => {
      const text = (part) => part.textContent.trim().replace(/[ \n]+/g, " ");
      const shown = (selector) => [...root.querySelectorAll(selector)].filter((part) => !part.hidden).map(text);
      const parts = [];
      if (slider) {
        const { symbol } = slider.querySelector("input").dataset;
        parts.push([`${symbol} = ${text(slider.querySelector("b"))}`, ...slider.querySelectorAll(".be-same:not([hidden])")]
          .map((part) => part.textContent ?? part).join(", "));
      }
      parts.push(...shown(".be-headline [data-when]").map((verdict) => `Bound ${verdict}`));
      parts.push(shown(".be-row").join(", "), ...shown('[data-when="large"]'));
      root.querySelector(".be-live").textContent = parts.join(". ");
    };

    form.addEventListener("input", (event) => {
      const { name, value, type } = event.target;
      const slider = event.target.closest(".be-slider");
      at[type === "radio" ? name : slider.dataset.axis] = Number(value);
      draw();
      say(slider);
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.querySelector("button").addEventListener("click", () => {
      form.reset();
      Object.assign(at, data.first);
      draw();
      say(null);
    });
    form.reset(); // a browser that goes back restores sliders, not what they show
    root.dataset.ready = "";
    draw();
  };

  document.querySelectorAll(".bound-explorer:not([data-ready])").forEach(upgrade);
})();
