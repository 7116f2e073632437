// A classic script that Dash needs before it renders. All other code is in modules in js/, imported on demand.
(function () {
  const assets = new URL(".", /** @type {HTMLScriptElement} */ (document.currentScript).src);
  /** @type {(name: string) => Promise<any>} */
  const load = (name) => import(new URL(`js/${name}.js`, assets).href);

  // Most pages have charts. Plotly's megabytes come and are compiled while Dash asks for the layout. If that fails, the page says so.
  if (/\/(runs\/|compare|forecasts)/.test(location.pathname)) load("loading").then(({ plotly }) => plotly()).catch(() => {});

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.paceline = {
    // Called whenever Dash shows a page's layout.
    open: (/** @type {PageData} */ page) => {
      load("main").then((main) => main.open(page));
      return window.dash_clientside.no_update;
    },
  };

  // Dash AG Grid evaluates column functions against this namespace; they must be synchronous.
  /** @type {Record<string, (value: any) => string>} */
  const formats = {};
  load("format").then((format) => Object.assign(formats, format));
  /** @type {(name: string) => (value: any) => string} */
  const safely = (name) => (value) => (formats[name] ? formats[name](value) : "");
  window.dashAgGridFunctions = window.dashAgGridFunctions || {};
  window.dashAgGridFunctions.paceline = {
    seconds: safely("seconds"),
    ratio: safely("ratio"),
    number: safely("number"),
    integer: safely("integer"),
    percent: safely("percent"),
    moment: safely("moment"),
    device: safely("device"),
    // The grid uses the page's colour variables, so that it follows the theme without a redraw.
    gridTheme: (/** @type {any} */ base) =>
      base.withParams({
        accentColor: "var(--accent)",
        backgroundColor: "var(--panel)",
        foregroundColor: "var(--text)",
        borderColor: "var(--line)",
        headerBackgroundColor: "var(--panel)",
        headerTextColor: "var(--muted)",
        browserColorScheme: "inherit",
        fontFamily: "inherit",
        fontSize: 13,
        wrapperBorderRadius: 8,
        spacing: 6,
      }),
  };

  /** @type {(...parts: any[]) => any} */
  const element = (...parts) => window.React.createElement(...parts);
  const components = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  /** @typedef {{ data: any, value: any }} GridCell what AG Grid hands to a cell's component */
  components.RunLink = (/** @type {GridCell} */ { data }) => {
    const href = new URL(`../runs/${encodeURIComponent(data.id)}`, assets).pathname;
    const follow = (/** @type {MouseEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
      event.preventDefault(); // stay in the application: the next page needs no reload
      window.dash_clientside.set_props("url", { pathname: href });
    };
    const link = element("a", { href, onClick: follow, className: "run-link" }, data.name || data.id);
    if (data.backend === "simulated") return element("span", null, link, badge("simulated", "Workers, their times and the clock are simulated"));
    return data.emulated ? element("span", null, link, badge("emulated", "Device speeds are emulated")) : link;
  };
  /** @type {(words: string, title: string) => any} */
  const badge = (words, title) => element("span", { className: "badge warn", title }, words);
  components.RunTags = (/** @type {GridCell} */ { value }) =>
    element("span", null, ...(value ?? []).map((/** @type {string} */ tag) => element("span", { className: "badge tag", key: tag }, tag)));
  components.RunState = (/** @type {GridCell} */ { value }) => element("span", { className: `state ${value}` }, value);
  components.RunVerdict = (/** @type {GridCell} */ { data }) =>
    element(
      "span",
      { className: `run-verdict ${data.tone}`, title: data.verdict },
      element("span", { className: "run-verdict-icon", "aria-hidden": "true" }, data.icon),
      data.verdict,
    );
  components.RunProgress = (/** @type {GridCell} */ { data }) => {
    if (data.progress === null) return element("span", null, "–");
    const width = `${Math.round(100 * data.progress)}%`;
    return element("span", { className: data.ended ? "progress ended" : "progress", title: `${width} of all steps` }, element("i", { style: { width } }));
  };
  components.WorkerWhy = (/** @type {GridCell} */ { data }) => {
    if (!data.words) return element("span", null, "–");
    const { Tooltip } = window.dash_mantine_components;
    const shown = data.why || "–";
    const label = `${shown}: ${data.words}`;
    return element(
      Tooltip,
      { label: data.words, multiline: true, w: 300, withArrow: true, events: { hover: true, focus: true, touch: true } },
      element("button", { type: "button", className: "why", "aria-label": label }, shown),
    );
  };
})();
