// Asks for what a run's page begins with while Dash is still on its way: the page's head has this module.
import { BASE } from "./api.js";
import { askEarly } from "./ahead.js";

askEarly(location.pathname, BASE.pathname);
