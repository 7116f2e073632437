// What the modules in assets/js pass to each other, for `tsc --checkJs`. Field names are the API's (docs/internals.md).

type Column = (number | null)[];

/** Columns of steps, as `GET steps` answers; a row of them is a `Row`. */
interface StepColumns {
  bucket: number;
  step: number[];
  [metric: string]: any;
}

interface Row {
  step: number;
  [metric: string]: any;
}

/** Columns by rank and step: `compute_s[row][at]`. */
interface WorkerColumns {
  bucket: number;
  ranks: number[];
  step: number[];
  compute_s: Column[];
  ett_s: Column[];
  share: Column[];
}

/** One step of all ranks: arrays by rank, NaN where nothing is known. */
interface Cell {
  compute_s: Float32Array;
  ett_s: Float32Array;
  share: Float32Array;
  quantiles?: Record<string, number | null>;
}

type CellName = "compute_s" | "ett_s" | "share";

/** [first step, one past the last). */
type Span = [number, number];

interface Segment {
  attempt: number;
  first_step: number;
  steps: number;
  version: number;
  source: "controller" | "coast";
  synchroniser_digest: string;
  why: string;
  fallback: string;
}

/** A request for a policy, and since when it plans. */
interface Switch {
  version: number;
  policy: string;
  parameters: Record<string, any>;
  requested_at: number;
  requested_by: string;
  effective_step: number | null;
  effective_at: number | null;
}

/** A synchroniser that a policy chose: from `step` on, for the reason `began`; `why` is the newest reason. */
interface SynchroniserChoice {
  attempt: number;
  version: number;
  digest: string;
  step: number;
  newest: number;
  began: string;
  why: string;
}

/** The same of a whole run, from `GET synchronisation`. */
interface ChosenSynchroniser {
  from: number;
  before: string | null;
  synchroniser: string;
  why: string;
}

/** What charts draw. */
interface View {
  bucket: number;
  cellBucket: number;
  step: number[];
  metrics: Record<string, any>;
  cellStep: number[];
  cells: Cell[];
  ranks: number[];
  world: number;
  coasts: Span[];
}

interface Colours {
  text: string;
  muted: string;
  line: string;
  accent: string;
  panel: string;
  mark: string;
  coast: string;
  ranks: string[];
}

/** What a chart shows besides its traces. */
interface ChartOptions {
  shapes: object[];
  annotations: object[];
  tick: string;
  suffix?: string;
  top?: number;
  legend?: boolean;
}

interface ExtraChart {
  id: string;
  traces: object[];
  options: Partial<ChartOptions>;
}

interface Run {
  id: string;
  name: string;
  state: "pending" | "starting" | "running" | "finished" | "failed" | "stopped";
  backend: string;
  node: string | null;
  script: string;
  args: string[];
  nproc: number;
  policy: string;
  version: number;
  started_at: number | null;
  ended_at: number | null;
  exit_code: number | null;
  message: string | null;
  dropped: number;
  world: number | null;
  samples: number | null;
  global_batch: number | null;
  seed: number | null;
  epochs: number | null;
  device: string | null;
  emulated: { a_s: number[]; b_s: number[] } | null;
  dif: number | null;
  epoch: number | null;
  step: number | null;
  controller: { owner: string; alive: boolean } | null;
  revision: number;
}

/** A change that somebody asked for. */
interface Change {
  at: number;
  who: string;
  via: string;
  action: string;
  revision: number | null;
  why: string;
  details: Record<string, any>;
}

type Changes = "nothing" | "batches" | "training";

/** JSON Schema of a parameter. */
interface ParameterSchema {
  type: "integer" | "number" | "string" | "boolean" | "array";
  default: any;
  title?: string;
  description?: string;
  enum?: any[];
  items?: ParameterSchema;
  perRank?: boolean;
  minimum?: number;
  exclusiveMinimum?: number;
  maximum?: number;
}

interface PresetInfo {
  name: string;
  summary: string;
  source: string;
  parameters: Record<string, ParameterSchema>;
  changes: Changes;
  changes_with: Record<string, Record<string, Changes>>;
}

interface AutoState {
  mode: "off" | "recommend" | "switch";
  relaxed: boolean;
  revision: number;
  last: {
    decided: "stay" | "wait" | "recommend" | "switch" | "back";
    reason: string;
    policy: string;
    parameters: Record<string, any>;
    at: number;
  } | null;
}

interface PresetForecast {
  policy: string;
  parameters: Record<string, any>;
  step_time_s: number;
  saving: number;
  saving_low: number;
  saving_high: number;
  words: string;
  changes: "nothing" | "batches" | "training";
  label: string;
  in_force: boolean;
  warnings: string[]; // what to know before a switch, those of harm first
  harmful: boolean; // plain DDP is faster
}

interface WorkerCause {
  rank: number;
  cause: string; // a kind of docs/verdicts.md, or "none"
  factor: number | null;
  words: string;
  caused: number;
}

/** A switch, as `GET forecasts/scores` has it in `items`. */
interface Outcome {
  run: string;
  version: number;
  policy: string;
  at: number;
  nodes: number | null;
  ranks: number | null;
  forecast: { saving: number; low: number; high: number };
  saving: number;
  low: number;
  high: number;
  error: number;
  inside: boolean;
}

/** How right forecasts were; null where there are none. */
interface Score {
  count: number;
  inside: number | null;
  median_error: number | null;
  p90_error: number | null;
  bias: number | null;
}

/** Opens the switch dialog for a preset and parameters. */
type OpenSwitchDialog = (policy: string, parameters: Record<string, any>) => void;

/** What the page is, from `page_data` in components.py. */
interface PageData {
  page: "runs" | "run" | "forecasts" | "missing";
  run: string;
  palette: string[];
  plotly: string;
}

// Libraries that Dash loads as classic scripts.
interface Window {
  Plotly: any;
  React: any;
  dash_ag_grid: any;
  dash_clientside: any;
  dash_mantine_components: any;
  dashAgGridComponentFunctions: any;
  dashAgGridFunctions: any;
}
